"""What each kind of action does: one module for each package format. ``pipeline.KINDS`` lists the
kinds.
"""
