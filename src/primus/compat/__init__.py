"""Commands and experiment files of older documents, translated to recipes."""
