# The C half of `signal`. The launch path imports it instead: `signal` builds its enums at import (2 ms).
from signal import *
from signal import struct_siginfo as struct_siginfo
