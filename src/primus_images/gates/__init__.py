"""Rules that a finished image must satisfy, checked against the contents of its layers, not against
the pins.
"""
