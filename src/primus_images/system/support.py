"""Until when a release is supported, in words."""

from datetime import date


def support_text(until: str | None, today: date) -> str:
    """Return what is said of a release that is supported until a day (ISO 8601); empty without one.

    What ended begins with "support ended".
    """
    if not until:
        return ""
    try:
        last = date.fromisoformat(until)
    except ValueError:
        return ""
    if today > last:
        return f"support ended on {until}: use a later release"
    return f"supported until {until}"
