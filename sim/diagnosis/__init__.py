"""From what all ranks have called to what one of them did."""
