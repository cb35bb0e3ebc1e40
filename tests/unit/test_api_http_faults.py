"""What the HTTP library says of bytes that are no HTTP is told without the bytes: they may be a key, or a prompt."""

import pytest

from pagefleet_server.log import name_fault


@pytest.mark.parametrize(
    ("said", "want"),
    [
        (
            "Bad status line:\n  Expected CRLF after version:\n\n  b'POST /\\nAuthorization: Bearer secret'\n   ^",
            None,
        ),
        ("400, message:\n  Invalid header value char:\n\n    b'Authorization: Bearer \\x00secret'\n     ^", None),
        ("Got more than 8190 bytes when reading: bytearray(b'/secret...').", "Got more than 8190 bytes when reading"),
        ('Got more than 8190 bytes when reading: "it\'s a secret".', "Got more than 8190 bytes when reading"),
        ("Bad status line 'GET /secret'", "Bad status line"),
        ("Invalid HTTP header: 'X: secret'", "Invalid HTTP header"),
        ("Missing 'Host' header in request.", "Missing 'Host' header in request."),
        ("Duplicate 'Content-Type' header found.", "Duplicate 'Content-Type' header found."),
        ("Content-Length can't be present with Transfer-Encoding:\n\n  b'X: 1'\n  ^", None),
        ("Request has invalid `Transfer-Encoding`:\n\n  b'7'\n  ^", "Request has invalid `Transfer-Encoding`"),
        ("", ""),
    ],
)
def test_quoted_bytes_are_left_out(said: str, want: str | None) -> None:
    told = name_fault(said)
    assert "secret" not in told and "b'" not in told and "\n" not in told
    assert told == want if want is not None else len(told) > 20, told
