"""Reading and rewriting GPU code: ELF files, bundles, and the architectures they name."""

# How bundles are rewritten; part of the keys. Increase it whenever the same input would give other
# bytes.
FORMAT = 1
