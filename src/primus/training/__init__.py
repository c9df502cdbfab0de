"""Run a resolved recipe, read its log, judge the outcome."""
