"""Verbs of the release engineer: plan, build, explain, lock, run, load, validate, verify, docs."""
