"""x"""


class TokenServers: ...


def are_same(a, b):
    return True
