import torch
from collections.abc import Mapping, Sequence
from tests.gpu import interpreter  # noqa
from tests.gpu import pretend
from recollect.engines.deep.chain import rows
from recollect.engines.deep.chain.rows import kernels
from torch import Tensor
from collections import Counter
ran=Counter()
def interpreted(kernel, programs, arguments, sizes):
    given = [pretend.host(x) if isinstance(x, Tensor) else x for x in arguments]
    def run():
        getattr(kernels, kernel)[(programs,)](*given, **sizes)
    ran[kernel]+=1
    run()
    pretend.enqueued(run)
rows.LAUNCHERS[pretend.NAME] = interpreted
