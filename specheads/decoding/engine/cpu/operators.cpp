// All operators, as one source: reading torch's headers takes longer than compiling what follows them.

#include "calls.h"
#include "layers.h"
#include "maps.h"
#include "sampling.h"
