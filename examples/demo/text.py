# SPDX-License-Identifier: Apache-2.0
"""A long document in a made-up language, and questions that only it can answer."""

import random
from dataclasses import dataclass

CONTEXT = 8
"""The model finds its place by this many letters: a document must not be ambiguous in them."""
_QUESTION = "\n\nHow does the passage go on that begins like this? "
_PHRASE = 20


@dataclass(frozen=True)
class Question:
    """A prompt that ends with the beginning of a passage, and how the document goes on."""

    prompt: str
    phrase: str
    continuation: str


def make_document(length: int, seed: int = 1) -> str:
    """Return at least `length` letters (a letter is a token) of words that were never written.

    Any `CONTEXT` letters are followed by the same letter wherever they occur.
    """
    chance = random.Random(seed)
    text, follows = "", dict[str, str]()
    while len(text) < length:
        words = [_word(chance) for _ in range(chance.randrange(6, 13))]
        sentence = " ".join(words).capitalize() + ". "
        learned = _learn(text[-CONTEXT:] + sentence, dict(follows))
        if learned is None or sentence[-CONTEXT:] in learned:
            continue  # ambiguous, or a dead end: only what stands there already could follow
        text += sentence
        follows = learned
    return text.rstrip()


def make_questions(document: str, count: int) -> list[Question]:
    """Return questions on places spread over the document. All prompts are equally long."""
    questions = []
    for index in range(count):
        at = document.index(" ", len(document) * (2 * index + 1) // (2 * count)) + 1
        while not _is_phrase(document, at):
            at = document.index(" ", at) + 1
        phrase, rest = document[at : at + _PHRASE], document[at + _PHRASE :]
        questions.append(Question(document + _QUESTION + phrase, phrase, rest))
    return questions


def _is_phrase(document: str, at: int) -> bool:
    """Return whether whole words of one sentence, `_PHRASE` letters in all, begin there."""
    phrase = document[at : at + _PHRASE]
    return "." not in phrase and document[at + _PHRASE : at + _PHRASE + 1] == " "


def _word(chance: random.Random) -> str:
    syllables = chance.choice((2, 2, 3, 3, 4))
    return "".join(
        chance.choice("bdfgklmnprstvz") + chance.choice("aeiou") + chance.choice(("", "", *"nrsl"))
        for _ in range(syllables)
    )


def _learn(text: str, follows: dict[str, str]) -> dict[str, str] | None:
    """Add what follows each context in `text`; None when it differs from what is known."""
    for at in range(CONTEXT, len(text)):
        context, letter = text[at - CONTEXT : at], text[at]
        if follows.setdefault(context, letter) != letter:
            return None
    return follows
