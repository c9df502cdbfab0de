"""The names of the suite's levels, apart from it: the command line offers them without loading it."""

LEVELS = ("quick", "standard", "full")
