"""Layers of the store as a root file system for the sandbox."""

from __future__ import annotations
