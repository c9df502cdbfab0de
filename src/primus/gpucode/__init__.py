"""Reading and rewriting GPU code: ELF files, bundles, fat binaries and the architectures they name."""
