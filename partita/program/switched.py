"""What a sum in the network takes: packets of 256 int32, in block floating point.

    n values  ->  ceil(n / 256) blocks  ->  a word of each value (two of a float64), and an exponent of each block
    packets   =   words x blocks + ceil(blocks / 256)                              the exponents are agreed on first

A worker sends so many packets and gets as many; nothing is sent twice over a link as in a ring.
"""

BLOCK = 256  # values that share an exponent: the lanes of a packet
PACKET = 32 + 4 * BLOCK  # bytes: header and lanes
WINDOW = 128  # packets under way
PORTS = 32  # workers of a group: the bits of a slot
OPS = ("switch_reduce", "block_reduce")  # through a switch; the same whole numbers through the backend's all_reduce


def words_of(width: int) -> int:
    """int32 words a float of `width` bytes takes."""
    return 2 if width == 8 else 1


def blocks_in(count: int) -> int:
    """Blocks of `count` values."""
    return -(-count // BLOCK)


def packets_of(count: int, width: int) -> int:
    """Packets a worker sends, and gets, for a sum of `count` floats of `width` bytes."""
    blocks = blocks_in(count)
    return words_of(width) * blocks + blocks_in(blocks)
