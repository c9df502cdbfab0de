"""Rules that a finished image must keep, read off its layers: what is inside, not what was asked for."""
