"""Commands of the documents that came before: what each of them asks for, in words of our recipes."""
