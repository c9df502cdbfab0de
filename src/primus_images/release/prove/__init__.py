"""`primus prove`: everything that one hour on a GPU can show, and the folder that is sent back."""
