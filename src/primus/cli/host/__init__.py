"""Verbs of the release engineer: from pins to a published image."""

__all__ = ["VERBS"]

# verb → (module, one line), as in primus.cli.main.
VERBS = {
    "plan": ("host.plan", "show what a build would do, layer by layer"),
    "build": ("host.build", "build images; the last line is the manifest digest"),
    "explain": ("host.explain", "name the input that changed since the last build, old → new"),
    "lock": ("host.lock", "resolve versions.yaml into exact files"),
    "run": ("host.run", "run a command inside an image"),
    "load": ("host.load", "put an image into a Docker engine"),
    "validate": ("host.validate", "train inside the image and judge the outcome"),
    "check": ("host.check", "examine what a built image holds: GPU code, versions, secrets, size"),
    "verify": ("host.verify", "rebuild into an empty store, compare, and check"),
    "publish": ("host.publish", "push images with their evidence to a registry"),
    "sbom": ("host.sbom", "print what an image is made of, as SPDX"),
    "why-size": ("host.why_size", "show which layers and folders make an image large"),
    "releases": ("host.releases", "list published images, or show all that is known of one"),
    "diff": ("host.diff", "compare two releases: components, sizes, GPUs"),
    "docs": ("host.docs", "write every generated file again, or check them"),
}
