from sglang_dflash.cpu import graphs as G


def variants(e):
    def use(n):
        def f():
            G.MOST_TOKENS = n

        return f

    return {"64": use(64), "all": use(10**6), "none": use(0)}
