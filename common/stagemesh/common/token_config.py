"""The configuration of the tokens by which clients identify themselves."""

from dataclasses import dataclass

from pydantic import ConfigDict


@dataclass(frozen=True)
class TokenConfig:
    """The tokens that a port for clients accepts: those of a file, those of an identity provider, or both."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    file: str = ""
    """The path of a file with the digests of tokens, which `stagemesh token new` writes. Empty for none.

    The file is read again when it has changed.
    """
    keys: str = ""
    """The JSON Web Key Set by which an identity provider signs its tokens (JWT): an https URL, or the path of a file.

    Empty if there is no provider.
    """
    issuer: str = ""
    """The value that the claim `iss` of a JWT must have."""
    audience: str = ""
    """The value that the claim `aud` of a JWT must contain."""
    caller_claim: str = "sub"
    """The claim of a JWT that contains the name of the caller."""

    def __post_init__(self) -> None:
        if not self.file and not self.keys:
            raise ValueError("tokens need `file` or `keys`")
        if bool(self.keys) != bool(self.issuer and self.audience) or bool(self.issuer) != bool(self.audience):
            raise ValueError("`keys`, `issuer` and `audience` belong together; set all of them, or none")
        if "://" in self.keys and not self.keys.startswith("https://"):
            raise ValueError(f"keys is {self.keys!r}; it must be an https URL, or the path of a file")


def check_tokens(tokens: TokenConfig | None, *, tls: str | None) -> None:
    """Raises ValueError if a config has tokens but no certificates."""
    if tokens is not None and tls is None:
        raise ValueError("tokens need tls; without it, anyone on the network can read and use them")
