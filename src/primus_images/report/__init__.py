"""Reports about finished runs: HTML pages, charts and CSV tables."""
