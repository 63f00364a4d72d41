"""Rows of tables: Parquet files by pyarrow, and Hub datasets by the `datasets` library. Nothing else imports either.

Both come with llmcompressor. They are imported at first use: `datasets` takes a second.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvq.errors import CalibrationError, HubError

BATCH_ROWS = 256


def parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows with those of the columns that the file has. Raises CalibrationError if it is damaged or has none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            present = [name for name in table.schema_arrow.names if name in columns]
            if not present:
                names = ", ".join(table.schema_arrow.names)
                raise CalibrationError(f"{file}: has no column {', '.join(columns)}; it has {names[:200]}.")
            for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=present):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        found = " ".join(str(error).split())[:200]
        raise CalibrationError(
            f"{file}: cannot be read as Parquet ({found}). Fetch it again, or give JSON lines under a name in .jsonl."
        ) from None


def hub_rows(repo: str, config: str | None, revision: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Rows of a split, streamed: what is not read is not downloaded. Raises HubError, CalibrationError."""
    import datasets
    import httpx

    place = f"hf://datasets/{repo}"
    try:
        yield from datasets.load_dataset(repo, config, split=split, revision=revision, streaming=True)
    except (ValueError, TypeError, KeyError) as error:  # another config or split, or a table that cannot be read
        raise CalibrationError(f"{place}:{split}: {' '.join(str(error).split())[:300]}") from None
    except (OSError, datasets.exceptions.DatasetsError, httpx.HTTPError) as error:
        raise HubError(
            f"{place}: cannot be read ({' '.join(str(error).split())[:300] or type(error).__name__})."
        ) from None
