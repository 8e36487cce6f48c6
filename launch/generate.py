"""`k3 generate`: continues a prompt with a run's model."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator

from k3jax.errors import UserError
from launch import session

HELP = "Continues a prompt with a run's model, one token at a time."
EXAMPLE = 'k3 generate --workdir=runs/mine --prompt="def " --max_tokens=200'

REPLACEMENT = "\ufffd"  # what a decoder writes for half a character
MAX_INT32 = 2**31 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    session.add_run_arguments(parser)
    parser.add_argument("--prompt", default="", type=_text, help="the text to continue; empty starts a document")
    count = _number(int, "a whole number from 1 up", 1, MAX_INT32)
    parser.add_argument("--max_tokens", type=count, default=200, metavar="N", help="the most to generate (200)")
    temperature = _number(float, "a number from 0 up", 0, sys.float_info.max)
    parser.add_argument(
        "--temperature", type=temperature, default=0.8, metavar="X", help="0 takes the most probable token (0.8)"
    )
    seed = _number(int, f"a whole number from 0 to {MAX_INT32}", 0, MAX_INT32)
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="the same seed gives the same text (0)")


def _text(argument: str) -> str:
    try:
        argument.encode()
    except UnicodeEncodeError:  # how Python hands on bytes that it could not decode
        raise argparse.ArgumentTypeError("is not text in UTF-8") from None
    return argument


def _number(kind: Callable[[str], float], noun: str, low: float, high: float) -> Callable[[str], float]:
    """A parser of an option's number that says what the option takes."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if low <= kind(text) <= high:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not {noun}")

    return parse


def run(args: argparse.Namespace) -> int:
    """Generates and prints as it goes; returns the exit status."""
    session.configure_logging()
    loaded = session.load_run(args.workdir, args.step, devices=1)

    from k3jax.data import load_tokenizer
    from k3jax.models.generate import generate_tokens

    config = loaded.config
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.document_token)
    opening = [] if tokenizer.document_token is None else [tokenizer.document_token]
    prompt = [*opening, *map(int, tokenizer.encode([args.prompt.encode()])[0])]
    if not prompt:
        raise UserError("--prompt is empty, and DataConfig.document_token, which could stand first, is None; give text")
    tokens = generate_tokens(
        config.model, loaded.variables, prompt, args.max_tokens,
        max_window=config.data.seq_len, num_ids=tokenizer.vocab_size, temperature=args.temperature, seed=args.seed,
    )  # fmt: skip
    print(args.prompt, end="", flush=True)
    for text in stream_text(tokenizer, tokens):
        print(text, end="", flush=True)
    print()
    return 0


def stream_text(tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Text as its tokens arrive, up to the end of the document; whole characters only.

    Args:
        tokenizer: a k3jax.data.Tokenizer.
        tokens: ids, one after the other.
    Yields:
        Pieces of the text.
    """
    ids: list[int] = []
    printed = 0
    for token in tokens:
        if token == tokenizer.document_token:
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith(REPLACEMENT):  # the rest of the character may be on its way
            yield text[printed:]
            printed = len(text)
    yield tokenizer.decode(ids)[printed:]
