"""The login page: plain HTML, since the app serves nothing before the login."""

from __future__ import annotations

from html import escape
from urllib.parse import quote

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>lorashard: log in</title><link rel="icon" type="image/svg+xml" href="favicon.ico"><style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }}
body {{ max-width: 22rem; margin: 12vh auto; padding: 0 1rem; }}
label {{ display: block; margin-top: 1rem; }}
input, button {{ box-sizing: border-box; width: 100%; padding: .6rem; font: inherit; border-radius: 6px; }}
input {{ border: 1px solid #64748b; }}
button {{ margin-top: 1.5rem; border: 0; background: #1d4ed8; color: #fff; }}
:focus-visible {{ outline: 3px solid #3b82f6; outline-offset: 2px; }}
</style></head><body><h1>lorashard</h1>{message}
<form method="post" action="{action}">
<label>User<input name="username" value="{user}" autocomplete="username" required {focus_user}></label>
<label>Password<input name="password" type="password" autocomplete="current-password" required {focus_password}></label>
<button>Log in</button></form></body></html>
"""


def render_login(target: str, user: str = "", is_wrong: bool = False) -> str:
    """Return the page.

    Args:
        target: the page to open afterward, relative; empty for the first.
        user: the user name that was entered before.
        is_wrong: whether the user name or the password was wrong.
    """
    return _PAGE.format(
        message='<p role="alert">Wrong user or password.</p>' if is_wrong else "",
        action=escape("login" + (f"?next={quote(target)}" if target else "")),
        user=escape(user),
        focus_user="" if user else "autofocus",
        focus_password="autofocus" if user else "",
    )
