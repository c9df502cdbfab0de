"""From a project's files to the plan of an image: pins, lock and local files become actions with
keys.
"""
