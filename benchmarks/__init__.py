"""Benchmarks, most of which ``nox -s bench…`` runs. They are not part of the installed package."""
