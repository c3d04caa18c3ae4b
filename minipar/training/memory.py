"""What a rank holds: the bytes of the arrays that a model, its gradients and its optimizer keep."""


def held_bytes(model, optimizer):
    """{"parameters", "gradients", "optimizer", "gathered"}: bytes that this rank holds at this moment.

    model: a Module, or ZeRO around one. Arrays count once, with all of their memory; a view counts as what it is a view
    of. "optimizer" holds master weights too; "gathered" is what stage 3 has put together for the layers and will drop.
    """
    units, gathered, master = getattr(model, "units", []), [], []
    leaves = model.parameters() + (model.model.parameters() if units else [])
    parameters = [unit.shard for unit in units if unit.shard is not None] if units else [p.data for p in leaves]
    for unit in units:
        master.append(unit.master)
        (gathered if unit.stage == 3 else parameters).extend([] if unit.parameters is None else [unit.parameters])
    gradients = [p.grad for p in leaves] + [bucket.flat for bucket in getattr(model, "buckets", [])]
    states = [array for arrays in optimizer.state.values() for array in arrays]
    seen, result = set(), {}
    for kind, arrays in (
        ("parameters", parameters),
        ("gathered", gathered),
        ("gradients", gradients),
        ("optimizer", master + states),
    ):
        owners = {id(own): own for own in map(_memory, (a for a in arrays if a is not None))}
        result[kind] = sum(own.nbytes for key, own in owners.items() if key not in seen)
        seen |= set(owners)
    return result


def _memory(array):
    """The array whose memory this is a view of."""
    while getattr(array.base, "nbytes", None) is not None and hasattr(array.base, "dtype"):
        array = array.base
    return array
