// The schemas of torch.ops.epload. Implementations are registered where they are defined.
#include "device/pipe.h"

#include <torch/library.h>

#define PIPE "__torch__.torch.classes.epload.DevicePipe"
// Regions of tensors in open files.
#define REGIONS "int[] descriptors, Tensor files, Tensor offsets, Tensor origins, "

TORCH_LIBRARY(epload, m) {
  epload::register_device_pipe_class();
  m.def(
      "coalesced_bcast(Tensor(a!)[] tensors, int src, str inter_group, str intra_group, int bucket_bytes, "
      "str algorithm, Stream? stream=None, *, int leader=-1) -> ()");
  m.def("abort_hccl(__torch__.torch.classes.c10d.ProcessGroup group) -> bool");
  m.def("pack(Tensor(a!) bucket, Tensor[] sources, Tensor copies) -> ()");
  m.def("unpack(Tensor bucket, Tensor(a!)[] targets, Tensor copies) -> ()");
  m.def("device_pipe(Device device, int threads, int piece_bytes) -> " PIPE);
  m.def("pinned_memory(int nbytes, Device device) -> Tensor");
  m.def(
      "read_regions(" REGIONS "Tensor(a!)[] targets, Tensor copies, int threads, bool direct=False, " PIPE
      "? pipe=None) -> (int, int, int, int)");
  m.def("write_from_device(" REGIONS "Tensor[] sources, Tensor copies, " PIPE " pipe) -> (int, int, int, int)");
  m.def("upload(Tensor[] sources, Tensor origins, Tensor(a!)[] targets, Tensor copies, " PIPE " pipe) -> ()");
  m.def("download(Tensor[] sources, Tensor copies, Tensor(a!)[] targets, Tensor origins, " PIPE " pipe) -> ()");
  m.def("share_memory(Tensor[] tensors) -> (Tensor, Tensor, int[])");
  m.def("open_memory(Tensor handle, int nbytes, Device device) -> Tensor");
  m.def("close_memory(Tensor(a!) memory) -> ()");
  m.def(
      "relay(Tensor(a!) bucket, Tensor steps, str inter_group, str intra_group, int chunk_bytes, "
      "Tensor? board=None, float seconds=0) -> int");
  m.def("allocate_like(Tensor[] tensors, ScalarType dtype, Device device, int threads) -> Tensor[]");
  m.def("describe_memory(Tensor[] tensors) -> Tensor");
  m.def("checksum(Tensor bytes) -> int");
  m.def("digest_tensors(Tensor[] tensors, Tensor copies) -> Tensor");
  m.def("digest_bucket(Tensor bucket, Tensor copies) -> Tensor");
  m.def("encode_changes(Tensor base, Tensor changed, int unit, Tensor(a!) out) -> (int, int)");
  m.def(
      "encode_regions(Tensor[] base, Tensor[] changed, Tensor copies, int begin, int end, Tensor(a!) out, "
      "Tensor? bucket=None) -> (int, int)");
  m.def("apply_regions(Tensor encoded, Tensor(a!)[] base, Tensor copies, int begin, int end) -> int");
  m.def("check_changes(Tensor encoded, int nbytes) -> int");
  m.def("apply_changes(Tensor encoded, Tensor(a!) base) -> int");
  m.def("dtypes() -> (str[], int[])");
  m.def("cuda_obstacle(Device device) -> str");
  m.def("board_post(Tensor(a!) board, int slot, int value) -> ()");
  m.def("board_wait(Tensor board, int[] slots, int value, float seconds) -> int");
}
