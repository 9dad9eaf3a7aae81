"""Small stories with a question: a simulator of five kinds of the bAbI tasks (Weston et al. 2015).

| task | question | facts that it takes |
|---|---|---|
| 1 | where a person is | their last move |
| 2 | where a thing is | who took or left it, and where that person was |
| 3 | where a thing was before it came to a place | who took it, and two of their moves |
| 4 | what stands in a direction of a place, or of what a place does | one of two relations |
| 5 | who gave, who received, or what was given | one gift among others |

The world is simulated, so that any number of different stories can be had; words and law are our
own. A story hidden in long background text, sentence by sentence in order, is the task of BABILong
(Kuratov et al. 2024; ATLAS figure 4): `story_prompts` and `story_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.fields import Validated, int_check, integer, validate, validated_field
from recollect.tasks.prompts import Dice, Prompt, as_bytes, hide

__all__ = ["Story", "StoryConfig", "stories", "story_bytes", "story_prompts"]

PEOPLE = ("Anna", "Boris", "Clara", "Dmitri", "Elena", "Frank")
PLACES = ("kitchen", "garden", "office", "cellar", "library", "attic")
THINGS = ("apple", "ball", "book", "cup", "lamp", "letter")
DIRECTIONS = ("north", "south", "east", "west")
_HEAD = "Some sentences of this text belong to a story."


@dataclass(frozen=True, kw_only=True)
class StoryConfig(Validated):
    """Which task, and how long a story.

    Args:
        task: 1 to 5.
        facts: sentences of a story (task 4 always has 2), from 2 on (task 2), 3 (task 3).
        people: how many take part, 2 to 6.
        length: bytes of the prompt with its answer, for `story_prompts` and `story_bytes`; long
            enough for a sentence of about 40 bytes per fact.

    Raises:
        ValueError: a number out of range, naming it.

    Examples:
        >>> config = rc.tasks.StoryConfig(task=1, facts=2)
        >>> (story,) = rc.tasks.stories(config, 1, torch.Generator().manual_seed(0))
        >>> len(story.facts)
        2
    """

    task: int = validated_field(1, int_check(1, 5))
    facts: int = integer(8, at_least=1)
    people: int = validated_field(4, int_check(2, len(PEOPLE)))
    length: int = integer(1024)

    def validate(self) -> None:
        validate(
            self.field_label("facts"), int_check({2: 2, 3: 3, 5: 2}.get(self.task, 1)), self.facts
        )
        validate(self.field_label("length"), int_check(50 * (self.facts + 4)), self.length)

    @property
    def vocab(self) -> int:
        """The number of tokens: one per value of a byte."""
        return 256


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happened, and a question.

    Attributes:
        facts: sentences in order.
        question, answer: one word is the answer.
        supports: which facts it takes to answer, by index, in order.

    Examples:
        >>> config = rc.tasks.StoryConfig(task=1, facts=2)
        >>> (story,) = rc.tasks.stories(config, 1, torch.Generator().manual_seed(0))
        >>> story.answer in story.facts[story.supports[0]]
        True
    """

    facts: tuple[str, ...]
    question: str
    answer: str
    supports: tuple[int, ...]


def stories(config: StoryConfig, batch: int, generator: torch.Generator) -> tuple[Story, ...]:
    """Draw stories.

    Args:
        config: which task, and how long.
        batch: how many.
        generator: the only source of randomness, on the CPU.

    Raises:
        ValueError: a negative batch.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.StoryConfig(task=1, facts=3)
        >>> (story,) = rc.tasks.stories(config, 1, draw)
        >>> len(story.facts), story.answer in " ".join(story.facts)
        (3, True)
    """
    validate("stories: batch", int_check(), batch)
    dice = Dice(generator)
    tell = {1: _where_person, 2: _where_thing, 3: _where_before, 4: _directions, 5: _gifts}
    return tuple(tell[config.task](config, dice) for _ in range(batch))


def story_prompts(
    config: StoryConfig, background: Sequence[str], batch: int, generator: torch.Generator
) -> tuple[Prompt, ...]:
    """Stories hidden in background text, each sentence at a random place, in order.

    Args:
        config: which task; ``length`` is the bytes of each prompt with its answer.
        background: sentences of a text (`recollect.tasks.sentences`).
        batch, generator: as for `stories`.

    Raises:
        ValueError: no background; a length too short for the story.

    Examples:
        >>> background = ["The sea is wide.", "A door stood open."]
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.StoryConfig(task=1, facts=3, length=400)
        >>> (prompt,) = rc.tasks.story_prompts(config, background, 1, draw)
        >>> len(f"{prompt.text} {prompt.answer}".encode())
        400
    """
    dice = Dice(generator)
    found: list[Prompt] = []
    for story in stories(config, batch, generator):
        found.append(
            hide(
                story.facts,
                sorted(dice.share() for _ in story.facts),
                background,
                start=dice.below(max(1, len(background))),
                head=_HEAD,
                question=f"{story.question} Answer:",
                answer=f"{story.answer}.",
                length=config.length,
            )
        )
    return tuple(found)


def story_bytes(
    config: StoryConfig, background: Sequence[str], batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`story_prompts` as bytes.

    Args:
        config: of the stories.
        background: sentences of a text (`recollect.tasks.sentences`).
        batch: B, how many.
        generator: the only source of randomness, on the CPU.

    Returns:
        ``(inputs, labels)``, int64 ``[B, length − 1]``, with labels at the answer's bytes: the word
        and the full stop that ends it.

    Raises:
        ValueError: a negative batch; no sentences; a length that holds too little.

    Examples:
        >>> background = ["The sea is wide.", "A door stood open."]
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.StoryConfig(task=1, facts=3, length=400)
        >>> inputs, labels = rc.tasks.story_bytes(config, background, 2, draw)
        >>> inputs.shape
        torch.Size([2, 399])
    """
    return as_bytes(story_prompts(config, background, batch, generator), config.length)


# -- tasks 1 to 3: people move, take things along and leave them -----------------------------------


class _World:
    """Where everybody is, who has what, and the facts that say so.

    A person's place is known from their first move on; only then do they take or leave things. A
    thing's ``path`` holds its known places, each with the facts that prove it.
    """

    def __init__(self, people: Sequence[str], things: Sequence[str], dice: Dice) -> None:
        self.people, self.things, self.dice = people, things, dice
        self.facts: list[str] = []
        self.place: dict[str, str] = {}
        self.moved: dict[str, int] = {}  # the last move of a person
        self.holder: dict[str, str] = {}
        self.taken: dict[str, int] = {}  # when its holder took the thing
        self.lies: dict[str, str] = {}  # where a thing lies that was left
        self.path: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        self.proof: dict[str, tuple[int, ...]] = {}  # of where a thing is now

    def move(self) -> None:
        """Somebody goes to a place where they are not."""
        person = self.dice.one(self.people)
        self._go(person, self.dice.one([p for p in PLACES if p != self.place.get(person)]))

    def _go(self, person: str, place: str) -> None:
        at = len(self.facts)
        self.facts.append(f"{person} went to the {place}.")
        self.place[person], self.moved[person] = place, at
        for thing, holder in self.holder.items():
            if holder == person:
                self._arrives(thing, place, (self.taken[thing], at))

    def _arrives(self, thing: str, place: str, proof: tuple[int, ...]) -> None:
        self.proof[thing] = tuple(sorted(proof))
        self.path.setdefault(thing, []).append((place, self.proof[thing]))

    def takes(self) -> list[tuple[str, str]]:
        """Who could take what: things that nobody has and that may be where the person is."""
        return [
            (person, thing)
            for person, place in self.place.items()
            for thing in self.things
            if thing not in self.holder and self.lies.get(thing, place) == place
        ]

    def take(self, person: str, thing: str) -> None:
        """A person takes a thing to where they are."""
        at = len(self.facts)
        self.facts.append(f"{person} took the {thing}.")
        self.holder[thing], self.taken[thing] = person, at
        known = thing in self.lies
        self.lies.pop(thing, None)
        if not known:
            self._arrives(thing, self.place[person], (at, self.moved[person]))

    def leave(self) -> bool:
        """Somebody leaves a thing where they are, if anybody has one."""
        if not self.holder:
            return False
        thing = self.dice.one(sorted(self.holder))
        person = self.holder.pop(thing)
        at = len(self.facts)
        self.facts.append(f"{person} left the {thing}.")
        self.lies[thing] = self.place[person]
        self.proof[thing] = tuple(sorted((at, self.moved[person])))
        return True

    def act(self) -> None:
        """Something happens: mostly moves, sometimes a thing is taken or left."""
        chance = self.dice.share()
        if chance < 0.3 and (found := self.takes()):
            self.take(*found[self.dice.below(len(found))])
        elif chance >= 0.45 or not self.leave():
            self.move()


def _where_person(config: StoryConfig, dice: Dice) -> Story:
    world = _World(dice.some(PEOPLE, config.people), (), dice)
    for _ in range(config.facts):
        world.move()
    person = dice.one(sorted(world.place))
    return Story(
        facts=tuple(world.facts),
        question=f"Where is {person}?",
        answer=world.place[person],
        supports=(world.moved[person],),
    )


def _lived(config: StoryConfig, dice: Dice, enough: int) -> Iterator[_World]:
    """Worlds after ``facts`` facts, with at least ``enough`` known places of one thing."""
    while True:
        world = _World(dice.some(PEOPLE, config.people), dice.some(THINGS, 3), dice)
        while len(world.facts) < config.facts:
            world.act()
        if any(len(path) >= enough for path in world.path.values()):
            yield world


def _where_thing(config: StoryConfig, dice: Dice) -> Story:
    world = next(_lived(config, dice, 1))
    thing = dice.one(sorted(world.proof))
    holder = world.holder.get(thing)
    return Story(
        facts=tuple(world.facts),
        question=f"Where is the {thing}?",
        answer=world.lies[thing] if holder is None else world.place[holder],
        supports=world.proof[thing],
    )


def _where_before(config: StoryConfig, dice: Dice) -> Story:
    for world in _lived(config, dice, 2):
        asked = [
            (thing, index)
            for thing, path in sorted(world.path.items())
            for index in range(1, len(path))
            if sum(place == path[index][0] for place, _ in path) == 1
        ]
        if asked:
            thing, index = asked[dice.below(len(asked))]
            (before, why), (place, then) = world.path[thing][index - 1 : index + 1]
            return Story(
                facts=tuple(world.facts),
                question=f"Where was the {thing} before the {place}?",
                answer=before,
                supports=tuple(sorted({*why, *then})),
            )
    raise AssertionError  # pragma: no cover - there is always another world


# -- task 4: places and directions -----------------------------------------------------------------


_OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
_Relation = tuple[str, str, str]  # (a, direction, b): a is in that direction of b


def _closed(relations: Sequence[_Relation]) -> set[_Relation]:
    """What relations say together: what they say backwards, and of what lies on one line."""
    known = {*relations, *((b, _OPPOSITE[d], a) for a, d, b in relations)}
    while True:
        more = {(a, d, c) for a, d, b in known for x, e, c in known if (b, d) == (x, e) and a != c}
        if more <= known:
            return known
        known |= more


def _directions(config: StoryConfig, dice: Dice) -> Story:
    """Two relations that share a place; the question is about one of them.

    It is drawn among those that one place answers, whichever way the relations are read: of "The
    attic is north of the cellar." and "The cellar is south of the office." none asks what is north
    of the cellar.
    """
    one, middle, other = dice.some(PLACES, 3)
    first, second = dice.some(DIRECTIONS, 2)
    if dice.below(2):
        relations = [(one, first, middle), (middle, dice.one(DIRECTIONS), other)]
    else:
        relations = [(one, first, middle), (other, second, middle)]
    order = dice.order(2)
    relations = [relations[i] for i in order]
    known = _closed(relations)
    asked: list[tuple[str, str, int]] = []
    for at, (a, direction, b) in enumerate(relations):
        if sum((d, y) == (direction, b) for _, d, y in known) == 1:
            asked.append((f"What is {direction} of the {b}?", a, at))
        if sum((x, d) == (a, direction) for x, d, _ in known) == 1:
            asked.append((f"What is the {a} {direction} of?", b, at))
    question, answer, at = asked[dice.below(len(asked))]
    return Story(
        facts=tuple(f"The {x} is {d} of the {y}." for x, d, y in relations),
        question=question,
        answer=answer,
        supports=(at,),
    )


# -- task 5: gifts ---------------------------------------------------------------------------------


def _gifts(config: StoryConfig, dice: Dice) -> Story:
    while True:
        people, things = dice.some(PEOPLE, config.people), dice.some(THINGS, 3)
        facts: list[str] = []
        holder: dict[str, str] = {}
        gifts: list[tuple[str, str, str, int]] = []
        while len(facts) < config.facts:
            free = [thing for thing in things if thing not in holder]
            if free and (not holder or dice.share() < 0.3):
                thing = dice.one(free)
                holder[thing] = dice.one(people)
                facts.append(f"{holder[thing]} took the {thing}.")
            else:
                thing = dice.one(sorted(holder))
                giver = holder[thing]
                holder[thing] = dice.one([p for p in people if p != giver])
                gifts.append((giver, thing, holder[thing], len(facts)))
                facts.append(f"{giver} gave the {thing} to {holder[thing]}.")
        asked = [(gift, slot) for gift in gifts for slot in range(3) if _alone(gift, slot, gifts)]
        if asked:
            (giver, thing, receiver, at), slot = asked[dice.below(len(asked))]
            question = (
                f"Who gave the {thing} to {receiver}?",
                f"What did {giver} give to {receiver}?",
                f"Who got the {thing} from {giver}?",
            )[slot]
            return Story(
                facts=tuple(facts),
                question=question,
                answer=(giver, thing, receiver)[slot],
                supports=(at,),
            )


def _alone(
    gift: tuple[str, str, str, int], slot: int, gifts: Sequence[tuple[str, str, str, int]]
) -> bool:
    """Whether the other two of giver, thing and receiver leave one gift to choose."""
    same = [g for g in gifts if all(g[i] == gift[i] for i in range(3) if i != slot)]
    return len(same) == 1
