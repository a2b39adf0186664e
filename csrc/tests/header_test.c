/* The header is C: it compiles as such, and its functions can be called. */
#include <stdio.h>
#include <string.h>

#include "megaslide.h"

int main(void) {
  const int32_t version = megaslide_abi_version();
  if (version != MEGASLIDE_ABI_VERSION) {
    printf("%s:%d: version %d, expected %d\n", __FILE__, __LINE__, version, MEGASLIDE_ABI_VERSION);
    return 1;
  }
  return strcmp(megaslide_status_string(MEGASLIDE_OK), "ok") == 0 ? 0 : 1;
}
