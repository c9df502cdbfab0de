"""The image store: layers, tar archives, canonical JSON and root file systems, in the OCI image
formats.
"""
