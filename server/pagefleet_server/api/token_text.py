"""The bytes that one token stands for, whatever the tokenizer's way of writing them."""

import json
import re

from tokenizers import Tokenizer, pre_tokenizers

from pagefleet_server.api.logprobs import TokenText

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPACE_MARK = "\u2581"


class TokenTexts:
    """Describes tokens of one tokenizer: byte-level (GPT-2's alphabet), or marked spaces with byte tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._num_tokens = tokenizer.get_vocab_size(with_added_tokens=True)
        kinds = decoder_kinds(tokenizer)
        self._bytes = gpt2_bytes() if kinds == {"ByteLevel"} else None
        self._byte_tokens = "ByteFallback" in kinds
        self._known: dict[int, bytes] = {}
        """Grows to the size of the vocabulary at most."""
        self._added = {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}

    def describe(self, token_id: int) -> TokenText:
        """Never raises; an id without a token has no text."""
        data = self.data(token_id)
        return TokenText(data.decode(errors="replace"), data)

    @property
    def is_byte_level(self) -> bool:
        """Whether the text of several tokens is that of their bytes together."""
        return self._bytes is not None

    def data(self, token_id: int) -> bytes:
        """Its bytes."""
        known = self._known.get(token_id)
        if known is None:
            known = self._data(token_id)
            if 0 <= token_id < self._num_tokens:
                self._known[token_id] = known
        return known

    def _data(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes is not None and all(char in self._bytes for char in token):
            return bytes(self._bytes[char] for char in token)
        if self._byte_tokens and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.replace(SPACE_MARK, " ").encode()


def decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """Names of the decoder's parts."""
    if tokenizer.decoder is None:
        return set()
    state = json.loads(tokenizer.decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))}


def gpt2_bytes() -> dict[str, int]:
    """Character of the byte-level alphabet -> byte. Printable bytes stand for themselves, the others follow from 256
    on in order (Radford et al. 2019, GPT-2's encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    return table
