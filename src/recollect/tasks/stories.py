"""Small stories with a question: a simulator of five kinds of the bAbI tasks (Weston et al. 2015).

| task | question | required facts |
|---|---|---|
| 1 | place of a person | the person's last move |
| 2 | place of a thing | its last take or leave, and the place of that person |
| 3 | place of a thing before another place | its take, and two moves of that person |
| 4 | place in a direction of another, or its inverse | one of two relations |
| 5 | giver, receiver or thing of a gift | one gift among others |

A simulation draws any number of different stories. Words and distributions differ from bAbI's. In
BABILong (Kuratov et al. 2024; ATLAS figure 4) the sentences of a story are hidden in long
background text, in order: `story_prompts` and `story_bytes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
    """Task and sizes of stories.

    Args:
        task: number of the task, 1 to 5.
        facts: number of sentences of a story; at least 2 in tasks 2 and 5, 3 in task 3. Task 4
            always has 2.
        people: number of people, 2 to 6.
        length: number of bytes of the prompt with its answer, for `story_prompts` and
            `story_bytes`; at least 50 bytes per fact, and 200 more.

    Raises:
        ValueError: a number is out of range; names the number.

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
    """A story and a question.

    Attributes:
        facts: sentences in order.
        question, answer: question, and its answer of one word.
        supports: indices of the facts that determine the answer, in order.

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
        config: task and sizes.
        batch: number of stories.
        generator: the only source of randomness, on the CPU.

    Raises:
        ValueError: ``batch`` is negative.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.StoryConfig(task=1, facts=3)
        >>> (story,) = rc.tasks.stories(config, 1, draw)
        >>> len(story.facts), story.answer in " ".join(story.facts)
        (3, True)
    """
    validate("stories: batch", int_check(), batch)
    dice = Dice(generator)
    make = {
        1: _person_place,
        2: _thing_place,
        3: _previous_place,
        4: _directions,
        5: _gifts,
    }[config.task]
    return tuple(make(config, dice) for _ in range(batch))


def story_prompts(
    config: StoryConfig, background: Sequence[str], batch: int, generator: torch.Generator
) -> tuple[Prompt, ...]:
    """Draw stories hidden in background text, each sentence at a random position, in order.

    Args:
        config: task and sizes; ``length`` is the number of bytes of each prompt with its answer.
        background: sentences of a text (`recollect.tasks.sentences`).
        batch, generator: see `stories`.

    Raises:
        ValueError: there is no background, or the length is too short for the story.

    Examples:
        >>> background = ["The sea is wide.", "A door stood open."]
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.StoryConfig(task=1, facts=3, length=400)
        >>> (prompt,) = rc.tasks.story_prompts(config, background, 1, draw)
        >>> len(f"{prompt.text} {prompt.answer}".encode())
        400
    """
    dice = Dice(generator)
    return tuple(
        hide(
            story.facts,
            sorted(dice.fraction() for _ in story.facts),
            background,
            start=dice.below(max(1, len(background))),
            head=_HEAD,
            question=f"{story.question} Answer:",
            answer=f"{story.answer}.",
            length=config.length,
        )
        for story in stories(config, batch, generator)
    )


def story_bytes(
    config: StoryConfig, background: Sequence[str], batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw `story_prompts` as bytes.

    Args:
        config: configuration of the stories.
        background: sentences of a text (`recollect.tasks.sentences`).
        batch: number of prompts B.
        generator: the only source of randomness, on the CPU.

    Returns:
        ``(inputs, labels)``, int64 ``[B, length − 1]``, with labels at the answer's bytes: the word
        and the full stop after it.

    Raises:
        ValueError: ``batch`` is negative, there are no sentences, or the length is too short.

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
    """Places of people and things, holders of things, and the facts that determine them.

    A person's place is known after the first move. Only then does the person take or leave things.
    """

    def __init__(self, people: Sequence[str], things: Sequence[str], dice: Dice) -> None:
        self.people, self.things, self.dice = people, things, dice
        self.facts: list[str] = []
        self.place: dict[str, str] = {}  # of a person
        self.last_move: dict[str, int] = {}  # of a person
        self.holder: dict[str, str] = {}  # of a thing
        self.last_take: dict[str, int] = {}  # of a thing
        self.left_at: dict[str, str] = {}  # place of a thing without a holder
        self.path: dict[str, list[tuple[str, tuple[int, ...]]]] = {}  # known places with supports
        self.supports: dict[str, tuple[int, ...]] = {}  # facts that determine a thing's place

    def move(self) -> None:
        """Move a random person to another place, with the things that the person has."""
        person = self.dice.one(self.people)
        place = self.dice.one([p for p in PLACES if p != self.place.get(person)])
        index = len(self.facts)
        self.facts.append(f"{person} went to the {place}.")
        self.place[person], self.last_move[person] = place, index
        for thing, holder in self.holder.items():
            if holder == person:
                self._extend_path(thing, place, (self.last_take[thing], index))

    def _extend_path(self, thing: str, place: str, supports: tuple[int, ...]) -> None:
        self.supports[thing] = tuple(sorted(supports))
        self.path.setdefault(thing, []).append((place, self.supports[thing]))

    def possible_takes(self) -> list[tuple[str, str]]:
        """Return people with things that they can take: no holder, and no other known place."""
        return [
            (person, thing)
            for person, place in self.place.items()
            for thing in self.things
            if thing not in self.holder and self.left_at.get(thing, place) == place
        ]

    def take(self, person: str, thing: str) -> None:
        """Give a thing at the person's place to the person."""
        index = len(self.facts)
        self.facts.append(f"{person} took the {thing}.")
        self.holder[thing], self.last_take[thing] = person, index
        if self.left_at.pop(thing, None) is None:
            self._extend_path(thing, self.place[person], (index, self.last_move[person]))

    def leave(self) -> bool:
        """Leave a random thing at its holder's place, and return whether there was one."""
        if not self.holder:
            return False
        thing = self.dice.one(sorted(self.holder))
        person = self.holder.pop(thing)
        index = len(self.facts)
        self.facts.append(f"{person} left the {thing}.")
        self.left_at[thing] = self.place[person]
        self.supports[thing] = tuple(sorted((index, self.last_move[person])))
        return True

    def act(self) -> None:
        """Add a random fact: usually a move, sometimes a take or a leave."""
        chance = self.dice.fraction()
        if chance < 0.3 and (candidates := self.possible_takes()):
            self.take(*candidates[self.dice.below(len(candidates))])
        elif chance >= 0.45 or not self.leave():
            self.move()


def _person_place(config: StoryConfig, dice: Dice) -> Story:
    world = _World(dice.sample(PEOPLE, config.people), (), dice)
    for _ in range(config.facts):
        world.move()
    person = dice.one(sorted(world.place))
    return Story(
        facts=tuple(world.facts),
        question=f"Where is {person}?",
        answer=world.place[person],
        supports=(world.last_move[person],),
    )


def _worlds(config: StoryConfig, dice: Dice, min_places: int) -> Iterator[_World]:
    """Yield worlds after ``facts`` facts, with at least so many known places of one thing."""
    while True:
        world = _World(dice.sample(PEOPLE, config.people), dice.sample(THINGS, 3), dice)
        while len(world.facts) < config.facts:
            world.act()
        if any(len(path) >= min_places for path in world.path.values()):
            yield world


def _thing_place(config: StoryConfig, dice: Dice) -> Story:
    world = next(_worlds(config, dice, 1))
    thing = dice.one(sorted(world.supports))
    holder = world.holder.get(thing)
    return Story(
        facts=tuple(world.facts),
        question=f"Where is the {thing}?",
        answer=world.left_at[thing] if holder is None else world.place[holder],
        supports=world.supports[thing],
    )


def _previous_place(config: StoryConfig, dice: Dice) -> Story:
    for world in _worlds(config, dice, 2):
        candidates = [
            (thing, index)
            for thing, path in sorted(world.path.items())
            for index in range(1, len(path))
            if sum(place == path[index][0] for place, _ in path) == 1
        ]
        if candidates:
            thing, index = candidates[dice.below(len(candidates))]
            (answer, supports), (place, more) = world.path[thing][index - 1 : index + 1]
            return Story(
                facts=tuple(world.facts),
                question=f"Where was the {thing} before the {place}?",
                answer=answer,
                supports=tuple(sorted({*supports, *more})),
            )
    raise AssertionError  # pragma: no cover - the iterator never ends


# -- task 4: places and directions -----------------------------------------------------------------


_OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
_Relation = tuple[str, str, str]  # (a, direction, b): a is in that direction of b


def _closure(relations: Sequence[_Relation]) -> set[_Relation]:
    """Return spatial relations closed under inversion, and transitivity along a direction."""
    known = {*relations, *((b, _OPPOSITE[d], a) for a, d, b in relations)}
    while True:
        more = {(a, d, c) for a, d, b in known for x, e, c in known if (b, d) == (x, e) and a != c}
        if more <= known:
            return known
        known |= more


def _directions(config: StoryConfig, dice: Dice) -> Story:
    """Return two relations that share a place, and a question about one of them.

    The question has one answer under the closure of both relations. After "The attic is north of
    the cellar." and "The cellar is south of the office.", no question asks for a place north of the
    cellar.
    """
    one, middle, other = dice.sample(PLACES, 3)
    first, second = dice.sample(DIRECTIONS, 2)
    if dice.below(2):
        relations = [(one, first, middle), (middle, dice.one(DIRECTIONS), other)]
    else:
        relations = [(one, first, middle), (other, second, middle)]
    order = dice.order(2)
    relations = [relations[i] for i in order]
    closure = _closure(relations)
    questions: list[tuple[str, str, int]] = []
    for index, (a, direction, b) in enumerate(relations):
        if sum((d, y) == (direction, b) for _, d, y in closure) == 1:
            questions.append((f"What is {direction} of the {b}?", a, index))
        if sum((x, d) == (a, direction) for x, d, _ in closure) == 1:
            questions.append((f"What is the {a} {direction} of?", b, index))
    question, answer, index = questions[dice.below(len(questions))]
    return Story(
        facts=tuple(f"The {x} is {d} of the {y}." for x, d, y in relations),
        question=question,
        answer=answer,
        supports=(index,),
    )


# -- task 5: gifts ---------------------------------------------------------------------------------

_Gift = tuple[str, str, str]  # giver, thing, receiver


def _gifts(config: StoryConfig, dice: Dice) -> Story:
    while True:
        people, things = dice.sample(PEOPLE, config.people), dice.sample(THINGS, 3)
        facts: list[str] = []
        holder: dict[str, str] = {}
        gifts: dict[int, _Gift] = {}  # by the index of the fact
        while len(facts) < config.facts:
            free = [thing for thing in things if thing not in holder]
            if free and (not holder or dice.fraction() < 0.3):
                thing = dice.one(free)
                holder[thing] = dice.one(people)
                facts.append(f"{holder[thing]} took the {thing}.")
            else:
                thing = dice.one(sorted(holder))
                giver = holder[thing]
                holder[thing] = dice.one([p for p in people if p != giver])
                gifts[len(facts)] = (giver, thing, holder[thing])
                facts.append(f"{giver} gave the {thing} to {holder[thing]}.")
        # A question names two of giver, thing and receiver, and asks for the third.
        candidates = [
            (index, slot)
            for index, gift in gifts.items()
            for slot in range(3)
            if _is_unambiguous(gift, slot, gifts.values())
        ]
        if candidates:
            index, slot = candidates[dice.below(len(candidates))]
            giver, thing, receiver = gifts[index]
            question = (
                f"Who gave the {thing} to {receiver}?",
                f"What did {giver} give to {receiver}?",
                f"Who got the {thing} from {giver}?",
            )[slot]
            return Story(
                facts=tuple(facts),
                question=question,
                answer=gifts[index][slot],
                supports=(index,),
            )


def _is_unambiguous(gift: _Gift, slot: int, gifts: Collection[_Gift]) -> bool:
    """Whether no other gift has the same entries except for one slot."""
    matches = [g for g in gifts if all(g[i] == gift[i] for i in range(3) if i != slot)]
    return len(matches) == 1
