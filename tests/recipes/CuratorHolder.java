import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

/** Takes a Curator lock, and prints what fences it: the transaction, the session and the path of its node. */
public class CuratorHolder {
  static class Mutex extends InterProcessMutex {
    Mutex(CuratorFramework client, String path) {
      super(client, path);
    }

    String node() {
      return getLockPath();
    }
  }

  public static void main(String[] args) throws Exception {
    CuratorFramework client = CuratorFrameworkFactory.builder().connectString(args[0]).sessionTimeoutMs(1000)
        .connectionTimeoutMs(10000).retryPolicy(new RetryOneTime(100)).build();
    client.start();
    Mutex mutex = new Mutex(client, args[1]);
    mutex.acquire();
    long czxid = client.checkExists().forPath(mutex.node()).getCzxid();
    long session = client.getZookeeperClient().getZooKeeper().getSessionId();
    System.out.println(czxid + " " + Long.toHexString(session) + " " + mutex.node());
    System.in.read();
    System.exit(0);
  }
}
