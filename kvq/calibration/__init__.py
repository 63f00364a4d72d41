"""Running the source model layer by layer over calibration data, and what is learnt from it. Knows no bit widths."""
