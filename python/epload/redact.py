"""Removes credentials from text that leaves the program: messages, logs, reports, traces, and what the command line prints."""

from __future__ import annotations

import re

_MALFORMED = "a malformed URL"
"""Stands for a URL in which the end of the credentials cannot be told."""
_URL = re.compile(
    r"\b[A-Za-z][A-Za-z0-9+.-]{1,30}:/+"
    r"(?:[^\s/@:]{0,200}:(?!\s|\d{1,5}(?!\w))[^\n@]{1,200}@)?"  # a password may have spaces and quotes
    r"[^\s'\"<>]*"
)
_QUERY = re.compile(r"[?#]")
_ADDRESS = re.compile(r"\[[0-9A-Fa-f:.]+\]")
_PORT = re.compile(r":\d{1,5}(?!\w)")
_NAMED = re.compile(
    r"\b(X-(?:Amz|Goog)-[\w-]{1,40}|sig|signature|token|access_token|password|passwd|secret|aws_secret_access_key"
    r"|AccountKey|SharedAccessKey)=[^\s&'\"<>/]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(Bearer|Authorization: Basic) +[\w.~+/=-]{8,}")
_TOKENS = re.compile(r"\b(?:hf_|gh[a-z]_|github_pat_)\w{20,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")


def redact(text: str) -> str:
    """Returns the text without user, password, query and fragment of the URLs in it, and without tokens of known forms.

    A part of a URL that may be a credential is removed, even if it is not certain to be one.
    """
    if ":/" in text:
        text = _URL.sub(_without_punctuation, text)
    return _TOKENS.sub("...", _NAMED.sub(r"\1=...", _BEARER.sub(r"\1 ...", text)))


def _without_punctuation(match: re.Match[str]) -> str:
    """Redacts a URL in a sentence, where a colon or the like after it is not part of it."""
    url = match[0].rstrip(":.,;)")
    return redact_url(url) + match[0][len(url) :]


def redact_url(url: str) -> str:
    """Returns the same for a text that as a whole is a URL, with whatever characters. A path without a scheme stays as it is."""
    scheme, separator, rest = url.partition(":/")
    if not separator or (scheme.lower() == "file" and rest.startswith("//")):
        return url
    path = rest.lstrip("/")
    start = f"{scheme}:{'/' * (1 + len(rest) - len(path))}"
    place, *query = _QUERY.split(path, maxsplit=1)
    host = _ADDRESS.sub("", place.partition("/")[0], count=1)
    is_named = "@" in host or ":" in place.rpartition("@")[0] or ":" in _PORT.sub("", host) or "[" in host
    if query and "@" in query[0] and ":" in place:  # a password with "?" or "#"
        return _MALFORMED
    if is_named:  # a password may have slashes: credentials end at the last @
        place = place.rpartition("@")[2] if "@" in place else ""
        if not place:
            return _MALFORMED
    elif scheme.rpartition(":")[2] == "github":  # the first part may be a token
        place = "..." + place[len(host) :]
    return _TOKENS.sub("...", _NAMED.sub(r"\1=...", f"{start}{place}"))
