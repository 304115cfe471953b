"""Columns of the two tables of a mask."""

# Columns of the query table. A bound is ``base + slope * q``, clipped to [0, Tk].
START, ATTEND = 0, 1
BASES = slice(2, 6)  # lo1, hi1, lo2, hi2
SLOPES = slice(6, 10)
QUERY_COLUMNS = 10
# Columns of the key table.
KEY_START, IDENTITY = 0, 1
KEY_COLUMNS = 2
