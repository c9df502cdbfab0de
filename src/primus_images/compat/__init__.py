"""Commands of older documents, as a table of what each of them runs here, and the import of
Primus's experiments.
"""
