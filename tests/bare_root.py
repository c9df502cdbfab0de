"""Run README's commands where nothing is installed: in a new Debian or Ubuntu root file system that
holds Python alone.

    python tests/bare_root.py bookworm validate
    python tests/bare_root.py noble tests -- tests/unit/test_programs.py
    python tests/bare_root.py bookworm --user 'python3 -m venv v && v/bin/pip install -q nox &&
    v/bin/nox -s plan'

Needs root and mmdebstrap. The network is this machine's; so are apt's sources for Debian, the
certificates, and the variables of pip, of proxies and PRIMUS_*. Ubuntu's archive is that of
PRIMUS_UBUNTU_MIRROR and PRIMUS_UBUNTU_KEYRING. Folders that pip's configuration names come in with
--bind. The root is removed afterwards, its archive is kept.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
UBUNTU = ("noble",)
CHECKOUT = "/home/me/primus-images"
# Not locale, TERM, HOME or PATH: a bare machine sets none of them.
BROUGHT = re.compile(r"PIP_.*|PRIMUS_.*|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|.*_proxy|.*_PROXY")
# A chroot alone allows no user namespaces, so the root becomes that of a mount namespace.
ENTER = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
mount --rbind /dev "$1/dev"
mount --rbind /sys "$1/sys"
mount -t proc proc "$1/proc"
mount -t tmpfs -o mode=1777 tmpfs "$1/run"
root=$1
shift
while [ "$1" != -- ]; do
    mkdir -p "$root$1"
    mount --rbind "$1" "$root$1"
    shift
done
shift
mkdir -p "$root/.old"
cd "$root"
pivot_root . .old
umount -l /.old
rmdir /.old
exec "$@"
"""


def archive(suite: str, folder: Path) -> Path:
    """The packed root of ``suite``: what is essential, apt, Python and certificates."""
    made = folder / f"{suite}.tar"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            "--include=apt,ca-certificates,python3",
        ]
        if suite in UBUNTU:
            if not all(
                os.environ.get(name) for name in ("PRIMUS_UBUNTU_MIRROR", "PRIMUS_UBUNTU_KEYRING")
            ):
                sys.exit(
                    f"{suite}: set PRIMUS_UBUNTU_MIRROR and PRIMUS_UBUNTU_KEYRING to an archive "
                    "of Ubuntu"
                )
            mirror, keyring = (
                os.environ["PRIMUS_UBUNTU_MIRROR"],
                os.environ["PRIMUS_UBUNTU_KEYRING"],
            )
            more = [
                "--components=main,universe",
                f"--keyring={keyring}",
                suite,
                f"{made}.part.tar",
                *mirror.split(),
            ]
        else:
            more = [suite, f"{made}.part.tar"]
        subprocess.run([*command, *more], check=True)
        Path(f"{made}.part.tar").rename(made)
    return made


def furnish(root: Path, suite: str, user: bool) -> None:
    """A clone of this checkout's last commit, and what lets the root reach the network as this
    machine does.
    """
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    # The bundle for now, its additions for when a package makes the bundle anew.
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs")
    for certificate in Path("/usr/local/share/ca-certificates").glob("*.crt"):
        shutil.copy(certificate, root / "usr/local/share/ca-certificates")
    codename = re.search(
        r"^VERSION_CODENAME=(\S+)", Path("/etc/os-release").read_text(encoding="utf-8"), re.M
    )
    sources = Path("/etc/apt/sources.list.d/debian.sources")
    if codename and codename[1] == suite and sources.exists():
        shutil.copy(sources, root / "etc/apt/sources.list.d")
        (root / "etc/apt/sources.list").unlink(missing_ok=True)
    if user:
        subprocess.run(
            ["chroot", root, "useradd", "--create-home", "--shell", "/bin/sh", "me"], check=True
        )
    clone = root / CHECKOUT[1:]
    clone.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "clone", "--quiet", "--no-local", HERE, clone], check=True)
    if user:
        subprocess.run(["chroot", root, "chown", "-R", "me:me", "/home/me"], check=True)


def readme_line(name: str) -> str:
    """README's command between its markers."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- command: {re.escape(name)} -->\n```sh\n(.+)\n```\n<!-- end -->", text)
    return found[1] if found else name


def main() -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=("bookworm", "trixie", "noble"))
    parser.add_argument(
        "command", help="a command of README (validate, tests), or any shell command"
    )
    parser.add_argument("--user", action="store_true", help="as an ordinary user")
    parser.add_argument(
        "--bind",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of this machine to show",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=HERE / ".primus/bare",
        metavar="DIR",
        help="where roots are made",
    )
    words, more = sys.argv[1:], []
    if "--" in words:
        more = words[words.index("--") + 1 :]
        words = words[: words.index("--")]
    args = parser.parse_args(words)

    command = f"{readme_line(args.command)} {shlex.join(more)}".strip()
    brought = [f"{name}={value}" for name, value in os.environ.items() if BROUGHT.fullmatch(name)]
    packed = archive(args.suite, args.work)
    root = Path(tempfile.mkdtemp(prefix=f"{args.suite}-", dir=args.work))
    try:
        subprocess.run(["tar", "-xpf", packed, "-C", root], check=True)
        root.chmod(0o755)
        furnish(root, args.suite, args.user)
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        become = ["setpriv", "--reuid=me", "--regid=me", "--init-groups"] if args.user else []
        home = "HOME=/home/me" if args.user else "HOME=/root"
        inside = [
            "env",
            "-i",
            path,
            home,
            *brought,
            *become,
            "sh",
            "-c",
            f"cd {CHECKOUT} && {command}",
        ]
        print(f"$ {command}", flush=True)
        began = time.monotonic()
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc"]
        code = subprocess.run(
            [*spaces, "sh", "-c", ENTER, "sh", root, *args.bind, "--", *inside],
            stdin=subprocess.DEVNULL,
            check=False,
        ).returncode
        print(
            f"exit code {code} after {time.monotonic() - began:.0f} s in a bare {args.suite} root",
            flush=True,
        )
        return code
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
