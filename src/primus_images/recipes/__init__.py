"""Recipes: loading, choices, overrides, and checks of keys and values."""
