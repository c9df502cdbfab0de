"""`primus outdated`: pins that have newer versions."""

from concurrent.futures import ThreadPoolExecutor

from primus_images.cli.host.common import SeveralOptions
from primus_images.cli.host.lock import resolved_or_all
from primus_images.cli.verb import answer
from primus_images.errors import HostError
from primus_images.release.bump import Outlook, Outlooks
from primus_images.release.history import AMDS, load_history, namesake, newest_first
from primus_images.terminal import Screen, counted
from primus_images.waits import answer_of

_NAMED = ("rocm", "pytorch", "transformer_engine", "rccl", "primus_turbo")
_HEAD = ("component", "channel", "targets", "pinned", "compatible", "newest")


def outdated(options: SeveralOptions) -> int:
    """List the pins that have newer versions, and the newest that fits the other pins."""
    targets = resolved_or_all(options)
    outlooks = Outlooks(targets)
    with answer_of("the Python indexes"), ThreadPoolExecutor(4) as pool:
        pins = list(pool.map(outlooks.of, outlooks.uses))
    movable = [outlook for outlook in pins if outlook.newest or outlook.error]
    screen = Screen.of()
    lines = screen.table([_row(outlook) for outlook in movable], head=_HEAD)
    current = counted(len(pins) - len(movable), "pin")
    lines.append(f"{current} of {len(pins)} at the newest version")
    reasons = [f"{outlook.component}: {outlook.behind}" for outlook in movable if outlook.behind]
    for reason in dict.fromkeys(reasons):
        lines += screen.wrap(reason, hanging="  ")
    if any(target.arch and target.arch.startswith("gfx") for target in targets):
        lines += screen.wrap(_amds_newest(), hanging="  ")
    says = namesake(targets[0].versions, load_history())
    if says:
        lines += screen.wrap(f"! {says}", hanging="  ")
    document = [{**outlook._asdict(), "moves": outlook.versions} for outlook in pins]
    answer(options, document, lines)
    if any(outlook.error for outlook in pins):
        return HostError.exit_code
    return 0


def _amds_newest() -> str:
    """Return the newest image that AMD published, of those on record."""
    published = [release for release in load_history().releases if release.image == AMDS]
    newest = newest_first(published)[0]
    if not newest.components:
        return (
            f"AMD's newest image on record is {newest.reference}, whose versions are not on "
            f"record; `primus releases {newest.tag}` says what was looked for"
        )
    versions = [f"{name} {newest.components[name]}" for name in _NAMED if name in newest.components]
    return (
        f"AMD's newest image on record is {newest.reference} of {newest.date}: "
        f"{', '.join(versions)}; `primus diff versions.yaml {newest.tag}` compares"
    )


def _row(outlook: Outlook) -> tuple[str, ...]:
    best = outlook.error or outlook.compatible or "–"
    others = [name for name in outlook.versions if name != outlook.component]
    if others:
        best += f" (with {', '.join(others)})"
    return (
        outlook.component,
        outlook.channel,
        ", ".join(outlook.targets),
        outlook.pinned,
        best,
        outlook.newest or "–",
    )
