#include "common.h"

// Raised with every change of a signature; the loader's first call.
EXPORT int headstart_abi() { return 1; }
