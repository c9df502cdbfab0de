"""Releasing images: validation, evidence, registries, generated documents and the history of
releases.
"""
