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
<form method="post" action="{action}">{fields}
<button>Log in</button></form></body></html>
"""

_ACCOUNT = """
<label>User<input name="username" value="{user}" autocomplete="username" required {focus_user}></label>
<label>Password<input name="password" type="password" autocomplete="current-password" required
{focus_password}></label>"""
_TOKEN = """
<p>Open the address that <code>lorashard ui</code> printed when it was started, or copy its token to here.</p>
<label>Token<input name="password" type="password" autocomplete="current-password" required autofocus></label>"""


def render_login(target: str, user: str = "", is_wrong: bool = False, is_token: bool = False) -> str:
    """Return the page.

    Args:
        target: the page to open afterward, relative; empty for the first.
        user: the user name that was entered before.
        is_wrong: whether what was entered before was wrong.
        is_token: whether the server's token is asked for, not a user and a password.
    """
    account = _ACCOUNT.format(
        user=escape(user),
        focus_user="" if user else "autofocus",
        focus_password="autofocus" if user else "",
    )
    wrong = "Wrong token: each start of the server has another." if is_token else "Wrong user or password."
    return _PAGE.format(
        message=f'<p role="alert">{wrong}</p>' if is_wrong else "",
        action=escape("login" + (f"?next={quote(target)}" if target else "")),
        fields=_TOKEN if is_token else account,
    )
