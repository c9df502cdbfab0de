"""Measured comparisons. ``nox -s bench`` runs them; nothing here is part of what the project installs."""
