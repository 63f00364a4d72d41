"""Names and bytes of checkpoints: reading, source formats, architecture facts, writing. Knows no solver."""
