"""The names of the suite's levels, in a module of their own so that the command line need not import the suite."""

LEVELS = ("quick", "standard", "full")
