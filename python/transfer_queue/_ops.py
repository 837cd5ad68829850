from enum import IntEnum


class Op(IntEnum):
    PUT = 1
    COMMIT = 2
    ABORT = 3
    GET = 4
    RELEASE = 5
    CLEAR = 6
    CLEAR_PARTITION = 7
    LIST = 8
    WAIT = 9
    WATCH_OPEN = 10
    WATCH_NEXT = 11
    WATCH_CLOSE = 12
    META = 13
    RETRIEVE_META = 14
    RETRIEVE_KEYS = 15
    SET_TAGS = 16
    CONSUMPTION = 17
    RESET_CONSUMPTION = 18
    PRODUCTION = 19
    PARTITIONS = 20
    UNITS = 21
    CONFIG = 22
    STATUS = 23
