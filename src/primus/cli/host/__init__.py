"""Verbs that run on the host: from pins to a published image."""

# verb → (module, one line), as in primus.cli.main.
VERBS = {
    "plan": ("host.plan", "show what a build would do, layer by layer"),
    "build": ("host.build", "build images; the last line is the manifest digest"),
    "explain": ("host.explain", "show which inputs changed since the last build, old → new"),
    "lock": ("host.lock", "resolve versions.yaml to exact files"),
    "run": ("host.run", "run a command in an image"),
    "launch": ("host.launch", "run a recipe on several machines with Slurm or Kubernetes"),
    "load": ("host.load", "load an image into a Docker engine"),
    "validate": ("host.validate", "train in the image and check the results"),
    "check": ("host.check", "check the contents of an image: GPU code, versions, secrets, size"),
    "verify": ("host.verify", "rebuild into an empty store, compare the digests and check"),
    "publish": ("host.publish", "publish images with their evidence to a registry"),
    "sbom": ("host.sbom", "list the files an image is made of; --json prints SPDX"),
    "why-size": ("host.why_size", "show which layers and folders make an image large"),
    "releases": ("host.releases", "list published images, or show one"),
    "diff": ("host.diff", "compare two releases: components, sizes, GPUs"),
    "clean": ("host.clean", "free disk space: remove what no image, lock or last build needs"),
    "docs": ("host.docs", "generate the documents, or check that they are up to date"),
}
