"""Targets, plan, actions, layers, store, image."""
