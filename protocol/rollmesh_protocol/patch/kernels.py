"""The loops over elements, compiled by numba: counting, encoding and decoding one block.

An element's **class** is eight bits of its old value that include the exponent: whether it changes, and by how much,
depends on little else, and the receiver holds the old value. Walking over a block in order, each class has its own
count of unchanged elements since its last change; what is coded are those gaps and the changes:

- a **gap**, drawn when a class is first met and after each of its changes: how many elements of the class stay as
  they are before the next change, or :data:`END` when no more change in this block;
- a **step**, the signed distance of new and old in the order of floats (``ordered(b)``: all bits flipped for negative
  numbers, the sign bit for others), which is never zero; or, for classes where that is smaller (weights at zero), the
  new **value** itself.

Both are numbers that are cut into a symbol, which is entropy coded with a table of the class, and raw bits. Symbols
are coded by rANS (Duda, arXiv 1311.2540): 32 bits of state, 16 bits moved at a time, probabilities of 12 bits. Kernels
never trust a stream: every read is checked, and they answer with a code.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollmesh_protocol.compiled import compiled

PRECISION: Final = 12
"""Bits of a probability."""
TOTAL: Final = 1 << PRECISION
SYMBOLS: Final = 256
END: Final = 255
"""The gap of a class that changes no more."""
CLASSES: Final = 256
LOWEST: Final = 1 << 16
"""The rANS state is at least this between symbols; coding starts and decoding ends with exactly this."""
STEP_MODE: Final = 0
VALUE_MODE: Final = 1

_NEVER: Final = 1 << 30
"""More elements than a block has."""
_DIRECT: Final = 16
"""Numbers below this are symbols of their own; above, an octave has eight."""


def _number_symbols() -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8]]:
    """The symbol of each number below 2^16; the first number and the count of raw bits of each symbol."""
    first = np.zeros(SYMBOLS, dtype=np.int64)
    raw_bits = np.zeros(SYMBOLS, dtype=np.uint8)
    first[:_DIRECT] = np.arange(_DIRECT)
    for octave in range(4, 32):
        for part in range(8):
            symbol = _DIRECT + 8 * (octave - 4) + part
            first[symbol] = (8 + part) << (octave - 3)
            raw_bits[symbol] = octave - 3
    numbers = np.arange(1 << 16)
    used = _DIRECT + 8 * 28
    symbol_of = (np.searchsorted(first[:used], numbers, side="right") - 1).astype(np.uint8)
    return symbol_of, first, raw_bits


_SYMBOL_OF, FIRST, RAW_BITS = _number_symbols()


@compiled
def _symbol(number):
    if number < 65536:
        return np.int64(_SYMBOL_OF[number])
    octave = 16
    while number >> (octave + 1):
        octave += 1
    return _DIRECT + 8 * (octave - 4) + ((number >> (octave - 3)) & 7)


@compiled
def _change(old, new, width):
    """The step as a number: magnitude less one, and the sign in the lowest bit."""
    top = np.int64(1) << (width - 1)
    full = (top << 1) - 1
    step = _ordered(new, top, full, width) - _ordered(old, top, full, width)
    step = ((step + top) & full) - top
    is_negative = np.int64(step < 0)
    return (((step ^ -is_negative) + is_negative - 1) << 1) | is_negative


@compiled
def _ordered(word, top, full, width):
    """A word in the order of floats. Without branches: signs of weights and steps are coin tosses."""
    return word ^ (top | (-(word >> (width - 1)) & full))


@compiled
def _value(new, width):
    """The new value as a number: magnitude bits, and the sign in the lowest bit."""
    top = np.int64(1) << (width - 1)
    return ((new & (top - 1)) << 1) | (new >> (width - 1))


@compiled
def gather_block(old, new, starts, ends, shift, width, kinds, gaps, numbers, words, met):
    """Walk over a block once and note its changes, in order; how many changes there are, and how many classes are met.

    Of each change: its class (``kinds``, uint8), the gap before it (``gaps``, uint32), its step's number (``numbers``,
    uint32) and the new word (``words``); each has room for all elements of the block. Of each class that is met, in
    that order: the class, and how many changes came before (``met``, int64 [2, CLASSES]).
    """
    classes = 0
    changes = 0
    since = np.full(CLASSES, -_NEVER, dtype=np.int32)  # negative until the class is met
    for stretch in range(len(starts)):
        for index in range(starts[stretch], ends[stretch]):
            before = old[index]
            kind = (before >> shift) & 255
            after = new[index]
            count = since[kind] + 1
            since[kind] = count
            if before == after and count > 0:
                continue
            if count <= 0:
                since[kind] = 1
                met[0, classes] = kind
                met[1, classes] = changes
                classes += 1
                if before == after:
                    continue
            kinds[changes] = kind
            gaps[changes] = since[kind] - 1
            numbers[changes] = _change(np.int64(before), np.int64(after), width)
            words[changes] = after
            changes += 1
            since[kind] = 0
    return changes, classes


@compiled
def count_symbols(kinds, gaps, numbers, words, met, width, gap_counts, step_counts, value_counts):
    """Add what :func:`gather_block` noted to the histograms, int64 [CLASSES, SYMBOLS] each.

    ``value_counts`` counts what ``step_counts`` would be if the class were coded by value. Each class that was met
    adds one END.
    """
    for change in range(len(kinds)):
        kind = kinds[change]
        gap_counts[kind, _symbol(np.int64(gaps[change]))] += 1
        step_counts[kind, _symbol(np.int64(numbers[change]))] += 1
        value_counts[kind, _value(np.int64(words[change]), width) >> (width - 8)] += 1
    for index in range(met.shape[1]):
        gap_counts[met[0, index], END] += 1


@compiled
def encode_block(kinds, gaps, numbers, words, met, width, modes, gap_tables, step_tables, frequencies, cumulated):
    """The streams of what :func:`gather_block` noted: (rANS words, uint16; raw bits in words, uint32).

    ``gap_tables`` and ``step_tables`` (int32 [CLASSES], -1: the class never changes) name rows of ``frequencies`` and
    ``cumulated`` (uint32 [tables, SYMBOLS]).
    """
    room = 2 * len(kinds) + met.shape[1]
    tables = np.empty(room, dtype=np.int32)
    symbols = np.empty(room, dtype=np.uint8)
    extra = np.empty(room, dtype=np.uint32)
    slots = np.zeros(CLASSES, dtype=np.int64)  # where the gap that comes next in a class has its place
    events = 0
    bits = 0
    classes = 0
    for change in range(len(kinds) + 1):
        while classes < met.shape[1] and met[1, classes] == change:
            kind = met[0, classes]
            classes += 1
            if gap_tables[kind] >= 0:
                slots[kind] = events
                tables[events] = gap_tables[kind]
                symbols[events] = END
                extra[events] = 0
                events += 1
        if change == len(kinds):
            break
        kind = kinds[change]
        symbol = _symbol(np.int64(gaps[change]))
        symbols[slots[kind]] = symbol
        extra[slots[kind]] = gaps[change] - FIRST[symbol]
        bits += RAW_BITS[symbol]
        tables[events] = step_tables[kind]
        if modes[kind] == VALUE_MODE:
            number = _value(np.int64(words[change]), width)
            symbols[events] = number >> (width - 8)
            extra[events] = number & ((np.int64(1) << (width - 8)) - 1)
            bits += width - 8
        else:
            symbol = _symbol(np.int64(numbers[change]))
            symbols[events] = symbol
            extra[events] = numbers[change] - FIRST[symbol]
            bits += RAW_BITS[symbol]
        events += 1
        slots[kind] = events
        tables[events] = gap_tables[kind]
        symbols[events] = END
        extra[events] = 0
        events += 1

    is_value = np.zeros(len(frequencies), dtype=np.uint8)
    for kind in range(CLASSES):
        if step_tables[kind] >= 0 and modes[kind] == VALUE_MODE:
            is_value[step_tables[kind]] = 1
    raw = np.zeros((bits + 31) // 32 + 1, dtype=np.uint32)
    position = 0
    for event in range(events):
        length = width - 8 if is_value[tables[event]] else np.int64(RAW_BITS[symbols[event]])
        if length:
            word = position >> 5
            pair = np.uint64(extra[event]) << np.uint64(position & 31)
            raw[word] |= np.uint32(pair & np.uint64(0xFFFFFFFF))
            raw[word + 1] |= np.uint32(pair >> np.uint64(32))
            position += length

    stream = np.empty(events + 2, dtype=np.uint16)
    at = len(stream)
    state = np.uint64(LOWEST)
    for event in range(events - 1, -1, -1):
        frequency = frequencies[tables[event], symbols[event]]
        if state >= np.uint64(frequency) << np.uint64(32 - PRECISION):
            at -= 1
            stream[at] = np.uint16(state & np.uint64(0xFFFF))
            state >>= np.uint64(16)
        short = np.uint32(state)  # below 2^32, and a short division is faster
        whole = short // frequency
        state = (np.uint64(whole) << np.uint64(PRECISION)) + np.uint64(short - whole * frequency)
        state += np.uint64(cumulated[tables[event], symbols[event]])
    stream[at - 1] = np.uint16(state & np.uint64(0xFFFF))
    stream[at - 2] = np.uint16(state >> np.uint64(16))
    return stream[at - 2 :].copy(), raw[: len(raw) - 1].copy()


@compiled
def dense_numbers(old, new, starts, ends, width):
    """For every element 0 where it stays, and else one more than its step's number; uint32 [elements].

    The largest number would wrap to 0; it belongs to a step of half the range, which has another name: plus, not minus.
    """
    total = 0
    for stretch in range(len(starts)):
        total += ends[stretch] - starts[stretch]
    numbers = np.zeros(total, dtype=np.uint32)
    at = 0
    full = (np.int64(1) << width) - 1
    for stretch in range(len(starts)):
        for index in range(starts[stretch], ends[stretch]):
            if old[index] != new[index]:
                number = _change(np.int64(old[index]), np.int64(new[index]), width)
                numbers[at] = number + 1 if number < full else full
            at += 1
    return numbers


DECODED: Final = 0
CUT_SHORT: Final = 1
TOO_MANY: Final = 2
LEFT_OVER: Final = 3
SPARE_WORDS: Final = 4
"""Zeros that a caller puts behind each stream: a turn of the decoder reads at most three words of one past its end."""


@compiled
def _pull(state, at, words, lookup, table):
    """Take one symbol: (symbol, state, at)."""
    slot = lookup[table, state & np.uint64(TOTAL - 1)]
    state = np.uint64(((slot >> 8) & 4095) + 1) * (state >> np.uint64(PRECISION)) + np.uint64(slot >> 20)
    refilled = (state << np.uint64(16)) | np.uint64(words[at])
    is_low = state < np.uint64(LOWEST)  # no branch: it would be a coin toss
    return np.int64(slot & 255), refilled if is_low else state, at + is_low


@compiled
def _bits(raw, bit, count):
    """``count`` (below 32) raw bits from ``bit`` on."""
    word = bit >> 5
    pair = np.uint64(raw[word]) | (np.uint64(raw[word + 1]) << np.uint64(32))
    return np.int64((pair >> np.uint64(bit & 31)) & ((np.uint64(1) << np.uint64(count)) - np.uint64(1)))


@compiled
def _changed(before, number, mode, width):
    """The new word, given the old one and the number that :func:`_change` or :func:`_value` made."""
    top = np.int64(1) << (width - 1)
    full = (top << 1) - 1
    if mode == VALUE_MODE:
        return (number >> 1) | ((number & 1) << (width - 1))
    is_negative = number & 1
    step = (((number >> 1) + 1) ^ -is_negative) + is_negative
    ordered = (_ordered(before, top, full, width) + step) & full
    return ordered ^ (top | (((ordered >> (width - 1)) - 1) & full))


@compiled
def decode_block(old, starts, ends, shift, width, modes, gap_tables, step_tables, lookup, words, raw, positions, flips):
    """Decode a block against the old image: ascending positions within the block, and the bits that flip there.

    ``lookup`` (uint32 [tables, TOTAL]) has for each of the 4096 slots of a table its symbol (8 bits), its frequency
    less one (12) and the slot's place within the symbol (12). ``positions`` (uint32) and ``flips`` (the dtype's words)
    have room for exactly the changes that the patch declares. ``words`` and ``raw`` end in SPARE_WORDS zeros.

    Returns DECODED, or CUT_SHORT, TOO_MANY (changes) or LEFT_OVER (data, or room for changes).
    """
    left = np.zeros(CLASSES, dtype=np.int32)
    is_met = np.zeros(CLASSES, dtype=np.uint8)
    for kind in range(CLASSES):
        if gap_tables[kind] < 0:
            left[kind] = _NEVER
    most_words = len(words) - SPARE_WORDS
    most_bits = 32 * (len(raw) - SPARE_WORDS)
    if most_words < 2:
        return CUT_SHORT
    state = (np.uint64(words[0]) << np.uint64(16)) | np.uint64(words[1])
    at = 2
    bit = 0
    found = 0
    base = 0
    for stretch in range(len(starts)):
        begin = starts[stretch]
        for index in range(begin, ends[stretch]):
            before = old[index]
            kind = (before >> shift) & 255
            remaining = left[kind] - 1
            left[kind] = remaining
            if remaining >= 0:
                continue
            if is_met[kind] == 0:
                is_met[kind] = 1
                symbol, state, at = _pull(state, at, words, lookup, gap_tables[kind])
                if at > most_words:
                    return CUT_SHORT
                if symbol == END:
                    left[kind] = _NEVER
                    continue
                gap = FIRST[symbol] + _bits(raw, bit, RAW_BITS[symbol])
                bit += RAW_BITS[symbol]
                if bit > most_bits:
                    return CUT_SHORT
                if gap > 0:
                    left[kind] = min(gap, _NEVER) - 1
                    continue
            if found == len(positions):
                return TOO_MANY
            symbol, state, at = _pull(state, at, words, lookup, step_tables[kind])
            if modes[kind] == VALUE_MODE:
                number = (symbol << (width - 8)) | _bits(raw, bit, width - 8)
                bit += width - 8
            else:
                number = FIRST[symbol] + _bits(raw, bit, RAW_BITS[symbol])
                bit += RAW_BITS[symbol]
            positions[found] = base + index - begin
            flips[found] = before ^ _changed(np.int64(before), number, modes[kind], width)
            found += 1
            symbol, state, at = _pull(state, at, words, lookup, gap_tables[kind])
            if symbol == END:
                left[kind] = _NEVER
            else:
                left[kind] = min(FIRST[symbol] + _bits(raw, bit, RAW_BITS[symbol]), _NEVER)
                bit += RAW_BITS[symbol]
            if at > most_words or bit > most_bits:
                return CUT_SHORT
        base += ends[stretch] - begin
    is_clean = state == np.uint64(LOWEST) and at == most_words and (bit + 31) // 32 * 32 == most_bits
    return DECODED if is_clean and found == len(positions) else LEFT_OVER


@compiled
def decode_dense(old, starts, ends, width, planes, positions, flips):
    """The same from byte planes, uint8 [bytes of a word, elements], of what :func:`dense_numbers` made."""
    found = 0
    at = 0
    for stretch in range(len(starts)):
        for index in range(starts[stretch], ends[stretch]):
            number = np.int64(0)
            for plane in range(len(planes)):
                number |= np.int64(planes[plane, at]) << (8 * plane)
            if number:
                if found == len(positions):
                    return TOO_MANY
                before = np.int64(old[index])
                positions[found] = at
                flips[found] = before ^ _changed(before, number - 1, STEP_MODE, width)
                found += 1
            at += 1
    return DECODED if found == len(positions) else LEFT_OVER


@compiled
def flip(image, starts, ends, positions, flips):
    """XOR ``flips`` into an image at ``positions`` of a block, which must all lie inside it. Twice is nothing."""
    at = 0
    base = np.int64(0)
    for stretch in range(len(starts)):
        length = ends[stretch] - starts[stretch]
        shift = starts[stretch] - base
        base += length
        while at < len(positions) and np.int64(positions[at]) < base:
            image[shift + np.int64(positions[at])] ^= flips[at]
            at += 1
