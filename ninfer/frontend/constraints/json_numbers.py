"""Numbers of JSON within bounds, as Lark terminals.

None has more than 40 digits before its point, 39 behind it or two in its exponent, so that every
number is finite and none but zero is read as zero. Bounds other than the sign exclude exponents.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

MAX_WHOLE_DIGITS: Final = 40
_MAX_PLACES: Final = 39
LARGEST_INTEGER: Final = 10**18
"""Of integers without a bound: readers keep them in 64 bits."""
_EXACT_DIGITS: Final = 15
"""Different numbers of so many digits are different floats: what is less is read as less."""
_MAX_LISTED: Final = 2_000
"""Of multiples that are listed one by one."""
_MAX_REMAINDERS: Final = 5_000
"""Of a number divided by a step; the library keeps a state for each."""
_EXPONENT: Final = "(?:[eE][-+]?[0-9]{1,2})?"
_WHOLE: Final = f"(?:0|[1-9][0-9]{{0,{MAX_WHOLE_DIGITS - 1}}})"
_PLACES: Final = rf"(?:\.[0-9]{{1,{_MAX_PLACES}}})?"
_POSITIVE: Final = (
    rf"(?:[1-9][0-9]{{0,{MAX_WHOLE_DIGITS - 1}}}{_PLACES}"
    rf"|0\.0{{0,{_MAX_PLACES - 1}}}[1-9][0-9]{{0,{_MAX_PLACES - 1}}}){_EXPONENT}"
)
_NOT_NEGATIVE: Final = f"(?:{_WHOLE}{_PLACES}{_EXPONENT})"
NUMBER: Final = f"-?{_NOT_NEGATIVE}"
"""Any number, a regular expression."""


def integers(low: int, high: int) -> str | None:
    """A regular expression of the integers from `low` to `high`, None when there are none."""
    parts = []
    if low < 0:
        negative = _digits(max(1, -high), -low)
        parts += [f"-(?:{negative})"] if negative else []
    if low < 0 <= high:
        parts.append("-0")
    if high >= 0 and (positive := _digits(max(0, low), high)):
        parts.append(positive)
    return "|".join(parts) or None


def integer_bounds(case: Mapping[str, Any]) -> tuple[int, int]:
    """The least and the largest integer that the keywords allow; those beyond a quintillion only
    where a bound asks for them."""
    low, high = _lower(case), _upper(case)
    least = None if low is None else _up(*low)
    most = None if high is None else -_up(-high[0], high[1])
    if least is None:
        least = min(-LARGEST_INTEGER, LARGEST_INTEGER if most is None else most)
    if most is None:
        most = max(LARGEST_INTEGER, least)
    return least, most


def numbers(case: Mapping[str, Any]) -> list[str]:
    """Regular expressions that hold together for the numbers within the bounds of a case."""
    found = []
    if (low := _lower(case)) is not None:
        found.append(_at_least(*low))
    if (high := _upper(case)) is not None:
        found.append(_at_most(*high))
    return found or [NUMBER]


def listed_multiples(step: int, low: int, high: int) -> list[int] | None:
    """The multiples from `low` to `high`, None when they are too many to be listed."""
    first = -(-low // step) * step
    if (high - first) // step >= _MAX_LISTED:
        return None
    return list(range(first, high + 1, step))


def powers_of_ten(step: int) -> str | None:
    """A regular expression of the multiples of 10, 100 and so on; None for another step."""
    zeros = len(str(step)) - 1
    return rf"-?(?:0|[1-9][0-9]*0{{{zeros}}})" if step == 10**zeros else None


def has_few_remainders(step: float) -> bool:
    """Whether the library has room for the multiples of a step."""
    return Fraction(str(step)).numerator <= _MAX_REMAINDERS


def decimal_places(step: float) -> str | None:
    """A regular expression of the multiples of 1, 0.1, 0.01 and so on; None for another step."""
    exact = Decimal(str(step)).normalize()
    places = -int(exact.as_tuple().exponent)
    if exact.as_tuple().digits != (1,) or not 0 <= places <= _MAX_PLACES:
        return None
    return f"-?{_WHOLE}{_free_places(places)}"


def has_numbers(case: Mapping[str, Any]) -> bool:
    """Whether any number is within the bounds."""
    low, high = _lower(case), _upper(case)
    if low is None or high is None:
        return True
    return low[0] < high[0] or (low[0] == high[0] and not low[1] and not high[1])


def is_within(case: Mapping[str, Any], value: float) -> bool:
    """Whether a number keeps to bounds and `multipleOf`."""
    exact, low, high = _decimal(value), _lower(case), _upper(case)
    if low is not None and (exact < low[0] or (low[1] and exact == low[0])):
        return False
    if high is not None and (exact > high[0] or (high[1] and exact == high[0])):
        return False
    step = Fraction(str(case.get("multipleOf", 0)))
    return step == 0 or (Fraction(exact) / step).denominator == 1


def _lower(case: Mapping[str, Any]) -> tuple[Decimal, bool] | None:
    """The bound, and whether it is excluded itself."""
    bounds = _bounds(case, "minimum", "exclusiveMinimum")
    return max(bounds, default=None)


def _upper(case: Mapping[str, Any]) -> tuple[Decimal, bool] | None:
    bounds = _bounds(case, "maximum", "exclusiveMaximum")
    return min(bounds, key=lambda bound: (bound[0], not bound[1]), default=None)


def _bounds(case: Mapping[str, Any], bound: str, exclusive: str) -> list[tuple[Decimal, bool]]:
    keys = ((bound, False), (exclusive, True))
    return [(_decimal(case[key]), is_out) for key, is_out in keys if key in case]


def _decimal(value: float) -> Decimal:
    """The shortest number that is read as this one, without a sign of zero."""
    return Decimal(str(value)) or Decimal(0)


def _up(bound: Decimal, is_excluded: bool) -> int:
    """The least integer at or above a bound."""
    whole = int(bound.to_integral_value("ROUND_CEILING"))
    return whole + 1 if is_excluded and whole == bound else whole


def _digits(low: int, high: int) -> str:
    """Integers from 0 on without a sign; "" for none."""
    parts = []
    for length in range(len(str(low)), len(str(high)) + 1):
        least = max(low, 0 if length == 1 else 10 ** (length - 1))
        most = min(high, 10**length - 1)
        if least <= most:
            parts += _same_length(str(least), str(most))
    return f"(?:{'|'.join(parts)})" if parts else ""


def _same_length(low: str, high: str) -> list[str]:
    if low == high:
        return [low]
    length = len(low) - 1
    if low[0] == high[0]:
        rest = _same_length(low[1:], high[1:])
        return [f"{low[0]}(?:{'|'.join(rest)})"]
    if length == 0:
        return [f"[{low}-{high}]"]
    first, last, parts = int(low[0]), int(high[0]), []
    if low[1:].strip("0"):
        parts.append(f"{first}(?:{'|'.join(_same_length(low[1:], '9' * length))})")
        first += 1
    ending = []
    if high[1:].strip("9"):
        ending.append(f"{last}(?:{'|'.join(_same_length('0' * length, high[1:]))})")
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}][0-9]{{{length}}}")
    return parts + ending


def _at_least(bound: Decimal, is_excluded: bool) -> str:
    if bound < 0:
        return f"{_NOT_NEGATIVE}|-(?:{_up_to(-bound, is_excluded)})"
    if bound == 0:
        return _POSITIVE if is_excluded else _NOT_NEGATIVE
    return _from(bound, is_excluded)


def _at_most(bound: Decimal, is_excluded: bool) -> str:
    if bound < 0:
        return f"-(?:{_from(-bound, is_excluded)})"
    if bound == 0 and is_excluded:
        return f"-(?:{_POSITIVE})"
    return f"-{_NOT_NEGATIVE}|{_up_to(bound, is_excluded)}"


def _from(bound: Decimal, is_excluded: bool) -> str:
    """Numbers of at least a bound above 0, without sign and exponent."""
    whole, places = _split(bound)
    most = _num_places(whole, places, is_excluded)
    parts = [f"{whole}{part}" for part in _larger(places, most, is_excluded)]
    larger = _digits(int(whole) + 1, 10**MAX_WHOLE_DIGITS - 1)
    if larger:
        parts.append(f"{larger}{_free_places(most)}")
    return "|".join(parts)


def _up_to(bound: Decimal, is_excluded: bool) -> str:
    """Numbers from 0 to a bound, without sign and exponent."""
    whole, places = _split(bound)
    most = _num_places(whole, places, is_excluded)
    parts = [f"{whole}{part}" for part in _smaller(places, most, is_excluded)]
    if whole != "0":
        parts.append(f"{_digits(0, int(whole) - 1)}{_free_places(most)}")
    return "|".join(parts)


def _split(bound: Decimal) -> tuple[str, str]:
    whole, _, places = format(bound, "f").partition(".")
    return whole, places.rstrip("0")


def _num_places(whole: str, places: str, is_excluded: bool) -> int:
    most = _EXACT_DIGITS - len(whole) if is_excluded else _MAX_PLACES
    return max(most, len(places), 0)


def _free_places(most: int) -> str:
    return rf"(?:\.[0-9]{{1,{most}}})?" if most else ""


def _larger(places: str, most: int, is_excluded: bool) -> list[str]:
    """What may follow the whole part of a bound: places that make at least its own."""
    parts = []
    if not is_excluded:
        zeros = most - len(places)
        parts.append(rf"\.{places}0{{0,{zeros}}}" if places else _free_places(most))
    for index, digit in enumerate(places):
        if digit != "9":
            parts.append(
                rf"\.{places[:index]}[{int(digit) + 1}-9][0-9]{{0,{max(0, most - index - 1)}}}"
            )
    rest = most - len(places) - 1
    if rest >= 0 and (places or is_excluded):
        parts.append(rf"\.{places}0{{0,{rest}}}[1-9][0-9]{{0,{rest}}}")
    return parts


def _smaller(places: str, most: int, is_excluded: bool) -> list[str]:
    """What may follow the whole part of a bound: places that make at most its own."""
    parts = []
    for index, digit in enumerate(places):
        parts.append(rf"\.{places[:index]}" if index else "")
        if digit != "0":
            parts.append(
                rf"\.{places[:index]}[0-{int(digit) - 1}][0-9]{{0,{max(0, most - index - 1)}}}"
            )
    if not is_excluded:
        zeros = most - len(places)
        parts.append(rf"\.{places}0{{0,{zeros}}}" if places else rf"(?:\.0{{1,{most}}})?")
    return parts
