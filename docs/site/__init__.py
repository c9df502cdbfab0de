"""The site: ``python -m docs.site`` builds it."""
